"""From a profile and a search space to the best profile. Imports `dspark_deploy`, never the reverse."""
