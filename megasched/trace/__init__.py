"""What a real run did when: recorded on each rank, gathered into one file in Chrome's trace format, read again."""
