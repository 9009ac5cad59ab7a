"""One prompt on its way through the API process: its state, its choices, where its time went."""
