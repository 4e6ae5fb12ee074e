"""Models of other programs, and models made from others: Hugging Face, upcycling."""
