"""The profiles shipped with dspark-deploy: YAML, one file a deployment."""
