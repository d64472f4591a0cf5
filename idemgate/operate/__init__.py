"""What an operator may ask of a namespace: the verbs of the command line, and the list of acts."""
