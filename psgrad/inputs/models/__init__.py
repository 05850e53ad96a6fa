"""TODO psgrad.inputs.models"""
