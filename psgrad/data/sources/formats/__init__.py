"""The formats of data files: each subclass of Source in these modules reads one."""
