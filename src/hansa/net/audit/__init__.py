"""The audit log: signed entries, Merkle tree, verification and proofs."""
