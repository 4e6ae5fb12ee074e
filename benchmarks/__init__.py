import megazero  # noqa: F401 - sets environment variables, which torch reads when it is imported
