import sys


def main():
    from megasched.megatron.entry import run_script

    run_script(sys.argv[1], sys.argv[2:])
