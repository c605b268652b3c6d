"""What `refit demo` needs beside the services: a model, a task, a progress display, a picture."""
