"""The steps, one a file; a step that has been released is never changed."""
