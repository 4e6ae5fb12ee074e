"""The command `megazero` and its subcommands, also scripts of the repository. Begin with `commands`."""
