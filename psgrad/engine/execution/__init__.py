"""TODO psgrad.engine.execution"""
