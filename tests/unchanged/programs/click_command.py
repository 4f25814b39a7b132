"""A command of click, with an option and an exit code."""

import os

import click


@click.command()
@click.option("--epochs", default=1, show_default=True)
@click.argument("name")
def main(epochs, name):
    click.echo(f"{os.environ['RANK']} {epochs} {name}")
    if name == "wrong":
        raise click.UsageError("no such model")


main()
