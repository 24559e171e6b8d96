"""Replies: how answers of parties are checked, summed, stored and replayed."""
