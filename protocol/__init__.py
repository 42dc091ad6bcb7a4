"""The control plane's schema (`mesh.proto`) and its generated code (`make protocol`).

`VERSION` grows with every change that an older peer would misread; both sides refuse another one by name.
"""

VERSION = 1
