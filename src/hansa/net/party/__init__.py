"""A party of a federation: agent, local store, policy, privacy vault, receipts."""
