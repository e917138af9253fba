from hearth.daemon.cli import main

main()
