"""Records and draws which functions of servd run at a start and for a request: `servd trace`."""
