"""On which file system a path lies, and whether other nodes have it too."""

import os
from dataclasses import dataclass
from pathlib import Path

_NETWORK = {
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph", "cifs", "smb3", "smbfs", "9p", "afs", "wekafs", "panfs", "pvfs2",
    "orangefs", "glusterfs", "ocfs2", "gfs2", "virtiofs",
}  # fmt: skip
_NETWORK_FUSE = (
    "ceph",
    "gluster",
    "juice",
    "s3",
    "gcs",
    "goofys",
    "sshfs",
    "weka",
    "beegfs",
    "lustre",
    "quobyte",
    "curve",
    "alluxio",
    "blob",
)


@dataclass(frozen=True)
class FileSystem:
    kind: str
    """As the kernel names it: ext4, nfs4, lustre, ...; empty where it is not known."""
    mount: str

    @property
    def network(self) -> bool:
        """Whether it is one that nodes share."""
        return self.kind in _NETWORK or any(name in self.kind for name in _NETWORK_FUSE if self.kind.startswith("fuse"))


def existing_folder(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists: where it would be made."""
    path = Path(path).absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def file_system_of(path: Path, mounts: str | None = None) -> FileSystem:
    """Of the nearest existing folder; `mounts` has the form of /proc/self/mountinfo."""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text()
        except OSError:  # no Linux
            return FileSystem("", "/")
    place = os.path.realpath(existing_folder(path))
    found = FileSystem("", "/")
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        mount = fields.split()[4].replace("\\040", " ")
        if (place == mount or place.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(found.mount):
            found = FileSystem(rest.split()[0], mount)
    return found
