from setuptools import setup

NAME = "hearth_ros2"

setup(
    name=NAME,
    version="0.3.0",
    description="Node that offers the language model of a Hearth daemon to ROS 2",
    license="Apache-2.0",
    packages=[NAME],
    data_files=[
        ("share/ament_index/resource_index/packages", [f"resource/{NAME}"]),
        (f"share/{NAME}", ["package.xml"]),
        (f"share/{NAME}/launch", ["launch/hearth.launch.py"]),
    ],
    install_requires=["setuptools"],
    zip_safe=True,
    entry_points={"console_scripts": [f"hearth = {NAME}.node:main"]},
)
