from daemon.demo.show import main

main()
