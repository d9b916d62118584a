"""The operators, one file each, and how calls reach them: backends, dispatch, lowering of spans."""
