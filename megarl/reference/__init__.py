"""The frozen reference policy of the KL term."""
