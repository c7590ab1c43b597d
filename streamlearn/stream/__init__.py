"""From raw records to batches: what a record may hold, how it is decoded, how records become one packed row."""
