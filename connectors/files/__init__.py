"""Files that `streamlearn feed` reads row by row: JSONL, CSV, Parquet, Arrow, and folders of them."""
