from hansa.track.apart import main

main()
