"""From raw records to batches: what a record may contain, how it is decoded, and which records form a batch."""
