"""OpenAI HTTP and the request's life at the ingress. Imports kvrelay and router."""
