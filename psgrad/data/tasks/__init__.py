"""How a row becomes the inputs and the target of a pretrained model: a file for each kind of task."""
