"""Authentication and authorization: principals, tokens, keys, scopes, TLS. Only this package imports joserfc."""

from headrace.security.authenticator import Authenticator
from headrace.security.principals import Principal
from headrace.security.rate_limit import RateLimit
