"""The forecast beside a job: what it needs of the card, how long it takes, and what else could be done."""
