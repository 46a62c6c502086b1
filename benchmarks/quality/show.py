"""show"""
import argparse
def add_arguments(parser): pass
def main(arguments): pass
