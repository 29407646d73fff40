"""Files and folders on S3 and on the Hugging Face hub."""
