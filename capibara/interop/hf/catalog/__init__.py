"""The families of Hugging Face models that are declared by one file each; families.py registers them."""
