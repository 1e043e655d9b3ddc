"""What a definition does when it runs, learnt from calls on the meta device: nothing here changes one."""
