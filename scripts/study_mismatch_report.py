def write_report(*a): print(a[1].folder, list(a[1].folder.iterdir())); return 0
