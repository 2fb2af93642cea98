"""From words and YAML files to checked values: the parser, configs, methods by name, sizes."""
