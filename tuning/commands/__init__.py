"""The subcommands of `dspark-tune`, a module each; `tuning.sweep` puts them together."""
