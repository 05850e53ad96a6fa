"""TODO psgrad.inputs.sources"""
