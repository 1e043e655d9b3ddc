"""One reader for each kind of file that others give: what is wrong with one is one error with its place."""
