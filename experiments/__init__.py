"""What made the numbers of this project; see README.md here."""
