"""Authentication and authorization: principals, tokens, keys, scopes. Only this package imports joserfc."""

from headrace.http.auth.authenticator import Authenticator
from headrace.http.auth.principals import Principal
from headrace.http.auth.rate_limit import RateLimit
