"""What no plan says of a definition, found by runs on meta: which linears can be cut, and what counts heads."""
