"""What a run leaves on disk: its folder and its saved model."""
