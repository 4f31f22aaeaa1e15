"""Published figures that users compare with, as package data (README.md beside the CSV files says what they are)."""
