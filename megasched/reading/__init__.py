"""Each kind of file that others give has one reader: what is wrong with one is one error with its place."""
