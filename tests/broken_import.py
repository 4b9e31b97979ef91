"""Cannot be imported: a user's own module with a mistake in it, named by a Gin file or as MIXTURE_OR_TASK_MODULE."""

raise RuntimeError("this module is broken")
