"""Holdings: what a party has, its samples and columns, and the one gateway to them."""
