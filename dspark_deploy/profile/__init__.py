"""From a YAML file, its parents and `--set` to one validated `Profile` that knows where each value stands."""

from dspark_deploy.profile.loading import LoadedProfile, load_profile
from dspark_deploy.profile.schema import Profile, Speculative

__all__ = ["LoadedProfile", "Profile", "Speculative", "load_profile"]
