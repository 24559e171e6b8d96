from hansa.cli import main

main()
