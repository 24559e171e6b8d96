"""The privacy kernel: the code through which private data turn into something that leaves a party."""
