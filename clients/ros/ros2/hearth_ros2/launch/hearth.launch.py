"""Launch the node: `ros2 launch hearth_ros2 hearth.launch.py params_file:=hearth.yaml`."""

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import LifecycleNode


def generate_launch_description() -> LaunchDescription:
    """Describe one node; what it is asked and sees comes from remapped topics."""
    arguments = {
        "namespace": ("", "Namespace of the node."),
        "params_file": ("", "YAML file of the node's parameters; empty: defaults."),
        "address": ("", "Path of the daemon's socket; empty: $HEARTH_SOCKET, else its place."),
        "image": ("~/image", "Topic of sensor_msgs/Image to see."),
        "compressed": ("~/image/compressed", "Topic of sensor_msgs/CompressedImage to see."),
    }
    declared = [
        DeclareLaunchArgument(name, default_value=default, description=description)
        for name, (default, description) in arguments.items()
    ]
    node = LifecycleNode(
        package="hearth_ros2",
        executable="hearth",
        name="hearth",
        namespace=LaunchConfiguration("namespace"),
        parameters=[
            LaunchConfiguration("params_file"),
            {"address": LaunchConfiguration("address")},
        ],
        remappings=[
            ("~/image", LaunchConfiguration("image")),
            ("~/image/compressed", LaunchConfiguration("compressed")),
        ],
        output="screen",
    )
    return LaunchDescription([*declared, node])
