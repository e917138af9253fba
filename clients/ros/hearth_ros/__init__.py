"""Parts that the ROS 1 and ROS 2 nodes share; nothing here imports ROS."""
