"""What is minimised: ITC with its soft labels, ITM, MLM."""
